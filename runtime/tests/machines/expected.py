"""What is expected of a machine, as text."""

from __future__ import annotations

from kvpeer.agent.doctor.report import plan_text, problems_text
from kvpeer.core.topology import Machine, PlanRequest, plan

__all__ = ["expected_text"]


def expected_text(machine: Machine) -> str:
    """Topology, plan and problems, as `kvpeer doctor` prints them."""
    made = plan(machine, PlanRequest())
    return plan_text(machine, made) + problems_text(made.problems)
