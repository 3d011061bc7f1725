"""The SWIM machine: events and `now` in, effects out.

Source: Das, Gupta, Motivala: SWIM: Scalable Weakly-consistent Infection-style Process Group Membership Protocol (DSN
2002): probes (section 3.1), piggybacked rumours (4.1), suspicion and refutation (4.2), round-robin probing (4.3). What
differs, and why:

- News is forwarded to a few members at once, not only piggybacked: rumours spread in some tens of milliseconds.
- A suspect is told that it is suspected, by the member that suspects it and on every ping or ack that it gets, and each
  member asks it once more half-way through the suspicion: one lost rumour must not kill. Source of the first part:
  Dadgar, Phillips, Currey: Lifeguard: Local Health Awareness for More Accurate Failure Detection (DSN-W 2018).
- An agent that was not run for a while moves its own deadlines by that time instead of suspecting everybody (the
  simplest part of Lifeguard's local health).
- A closed or refused link is evidence of a death, but is checked: pings, direct and through relays, and a short
  suspicion.
- A death can be refuted (by a higher counter), and the dead are pinged slowly for a while: a partition that heals
  rejoins without anybody's help. In a pushed view a death is told as a suspicion, which the living refute: neither side
  of a partition can bury the other with old news. Seeds are contacted for ever, for partitions that outlast the memory
  of the dead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvpeer.core.membership.dissemination import Dissemination
from kvpeer.core.membership.effects import Effect, JoinSeed, MembersChanged, Send
from kvpeer.core.membership.probing import IndirectPing, IndirectPings, Probe, ProbeOrder, Probes
from kvpeer.core.membership.settings import (
    REFUTATION_MAX,
    SEED_INTERVAL_S_MIN,
    UPDATES_PER_GOSSIP_MAX,
    MembershipSettings,
)
from kvpeer.core.membership.table import Change, MemberState, MemberTable
from kvpeer.core.rng import Rng
from kvpeer.model import AGENT_ID_BYTES, AgentId
from kvpeer.wire.messages import AgentInfo, Gossip, MemberUpdate, Ping, PingAck, PingRequest

__all__ = ["Membership"]


class Membership:
    """One agent's membership. Every method returns what is to be done, in order. Not thread-safe; never blocks.

    The caller delivers messages with the authenticated sender's id, calls `tick` no later than `next_wakeup` says, and
    reports links that broke or could not be made. `now` is monotonic seconds.
    """

    def __init__(self, info: AgentInfo, settings: MembershipSettings, rng: Rng, now: float) -> None:
        self.agent_id = AgentId(info.agent_id)
        self._settings = settings
        self._rng = rng
        self._own = MemberUpdate(info, MemberState.ALIVE, 0)
        self._table = MemberTable()
        self._news = Dissemination(self._table, settings, rng)
        self._order = ProbeOrder(rng)
        self._probes = Probes()
        self._indirect = IndirectPings()
        self._sequence = 0
        self._last_now = now
        self._probe_at = now + rng.random() * settings.probe_interval_s
        self._dead_probe_at = now + rng.random() * settings.dead_probe_interval_s
        self._sync_at = now + rng.random() * settings.sync_interval_s
        self._seed_at = now
        self._seed_interval_s = SEED_INTERVAL_S_MIN
        self._effects: list[Effect] = []
        self._newcomers: list[AgentId] = []
        self._ended: set[AgentId] = set()
        self._view_changed = False
        self.n_updates_refused = 0
        """Updates that were malformed or beyond the limit of a message."""
        self.n_refutations = 0
        """Times this agent was suspected or declared dead and refuted it."""

    # ---- what the view is ---------------------------------------------------------------------------------------

    @property
    def has_left(self) -> bool:
        return self._own.state == MemberState.LEFT

    @property
    def n_members_refused(self) -> int:
        """Members that were not added because MEMBERS_MAX were known."""
        return self._table.n_refused

    def is_alive(self, agent_id: AgentId) -> bool:
        """Whether the agent is believed alive; suspects are."""
        return agent_id in self._table or (agent_id == self.agent_id and not self.has_left)

    def info_of(self, agent_id: AgentId) -> AgentInfo | None:
        """Where a member listens, also one that ended a while ago (it is pinged); None when unknown."""
        if agent_id == self.agent_id:
            return self._own.info
        known = self._table.member(agent_id) or self._table.ended(agent_id)
        return known.update.info if known else None

    def alive(self) -> tuple[AgentInfo, ...]:
        """All members believed alive, this agent included until it leaves, sorted by id."""
        infos = [member.update.info for member in self._table.members()]
        if not self.has_left:
            infos.append(self._own.info)
        return tuple(sorted(infos, key=lambda info: info.agent_id))

    def view(self) -> list[MemberUpdate]:
        """All that is known for people to read: this agent, members, and members that ended and are not forgotten."""
        members = (member.update for member in self._table.members())
        return [self._own, *members, *self._table.remembered(self._last_now, self._settings.forget_s)]

    def next_wakeup(self, now: float) -> float:
        """When `tick` is due at the latest; may be past. Infinite once this agent has left."""
        if self.has_left:
            return math.inf
        due = [self._seed_at]
        if self._table or self._table.remembered(now, self._settings.forget_s):
            due += (self._dead_probe_at, self._sync_at)
        if self._table:
            due.append(self._probe_at)
        due += self._probes.deadlines()
        for _, member in self._table.suspects():
            due += (at for at in (member.dead_at, member.ask_again_at) if at is not None)
        return min(due)

    # ---- events -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Does what is due: probes, suspicions that ran out, pushes of the view, seeds."""
        self._begin(now)
        if not self.has_left:
            self._run_probes(now)
            self._run_suspicions(now)
            self._run_repairs(now)
        self._indirect.expire(now)
        return self._finish()

    def hello(self, info: AgentInfo, now: float) -> list[Effect]:
        """An authenticated agent said who it is. Any other agent at its address has ended: one address, one run."""
        self._begin(now)
        agent_id = AgentId(info.agent_id)
        if agent_id == self.agent_id or len(agent_id) != AGENT_ID_BYTES:
            return self._finish()
        if self._table.ended(agent_id) is None:
            for predecessor in self._table.at_address(info):
                self._declare(predecessor, MemberState.DEAD, now)
        self._tell_if_ended(agent_id)
        if self._learn(MemberUpdate(info, MemberState.ALIVE, 0), now) is Change.JOINED:
            self._newcomers.append(agent_id)
        self._table.readdress(info)
        return self._finish()

    def joined(self, infos: Iterable[AgentInfo], now: float) -> list[Effect]:
        """A seed welcomed this agent and told whom it knows alive."""
        self._begin(now)
        self._news.spread(self._own)
        for info in infos:
            self._hear(MemberUpdate(info, MemberState.ALIVE, 0), now)
        return self._finish()

    def ping(self, sender: AgentId, message: Ping, now: float) -> list[Effect]:
        """Answers, also somebody unknown or believed dead."""
        self._begin(now)
        self._hear_all(message.updates, now)
        ack = PingAck(message.sequence, self.agent_id, self._news.piggyback(sender))
        self._effects.append(Send(sender, ack))
        return self._finish()

    def ack(self, sender: AgentId, message: PingAck, now: float) -> list[Effect]:
        """Ends the probe that this answers, or passes the ack on to whom we pinged for."""
        self._begin(now)
        self._hear_all(message.updates, now)
        subject = AgentId(message.subject)
        indirect = self._indirect.answered(message.sequence, subject)
        if indirect is not None and sender == subject:
            ack = PingAck(indirect.origin_sequence, subject, self._news.piggyback(indirect.origin))
            self._effects.append(Send(indirect.origin, ack))
        else:
            self._probes.answered(message.sequence, subject)
        self._tell_if_ended(sender)
        return self._finish()

    def ping_request(self, sender: AgentId, message: PingRequest, now: float) -> list[Effect]:
        """Pings the target for the sender, if it is known."""
        self._begin(now)
        self._hear_all(message.updates, now)
        target = AgentId(message.target)
        if target == self.agent_id:
            self._effects.append(Send(sender, PingAck(message.sequence, target, self._news.piggyback(sender))))
        elif target in self._table:
            sequence = self._next_sequence()
            asked = IndirectPing(sender, message.sequence, target, now + self._settings.indirect_timeout_s)
            if self._indirect.start(sequence, asked):
                self._send_ping(target, sequence)
        return self._finish()

    def gossip(self, sender: AgentId, message: Gossip, now: float) -> list[Effect]:
        """Believes what is news and passes it on."""
        self._begin(now)
        self._hear_all(message.updates, now)
        self._tell_if_ended(sender)
        return self._finish()

    def evidence_of_death(self, agent_id: AgentId, now: float) -> list[Effect]:
        """A link to this agent was reset or refused: asks at once, directly and through relays, whether it lives.

        One broken link between two live agents therefore kills nobody. Evidence that comes while it asks is ignored.
        """
        self._begin(now)
        if agent_id in self._table and not self._probes.is_verifying(agent_id) and not self.has_left:
            probe = Probe(agent_id, self._next_sequence(), None, now + self._settings.verify_timeout_s, True)
            self._probes.start(probe)
            self._send_ping(agent_id, probe.sequence)
            self._ask_relays(probe)
        return self._finish()

    def drain(self, now: float) -> list[Effect]:
        """Tells everybody that this agent is about to leave: still alive, but to get no new work. Once is enough."""
        self._begin(now)
        if self._own.state == MemberState.ALIVE:
            self._restate(MemberState.DRAINING, self._own.refutation + 1)
            self._view_changed = True
        return self._finish()

    def leave(self, now: float) -> list[Effect]:
        """Tells every member directly that this agent goes; it probes and refutes nothing any more."""
        self._begin(now)
        if not self.has_left:
            self._own = MemberUpdate(self._own.info, MemberState.LEFT, self._own.refutation + 1)
            self._effects += [Send(agent_id, Gossip([self._own])) for agent_id in self._table.ids()]
        return self._finish()

    # ---- one call's beginning and end ---------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Notices that this agent itself was not run: time in which it heard nobody is evidence against nobody."""
        gap_s = now - self._last_now
        self._last_now = max(now, self._last_now)
        if gap_s > self._settings.probe_interval_s + self._settings.stall_s:
            self._probes.postpone(gap_s)
            self._table.postpone(gap_s)

    def _finish(self) -> list[Effect]:
        """Forwards the news of this call, shows newcomers the view, reports a changed view; returns all effects."""
        self._effects += self._news.take_news()
        for agent_id in self._newcomers:
            self._effects += self._news.view_for(agent_id, self._own, self._last_now)
        self._newcomers.clear()
        if self._view_changed:
            draining = [AgentId(m.update.info.agent_id) for m in self._table.members() if m.is_draining]
            if self._own.state == MemberState.DRAINING:
                draining.append(self.agent_id)
            ended = tuple(sorted(agent_id for agent_id in self._ended if agent_id not in self._table))
            self._effects.append(MembersChanged(self.alive(), ended, tuple(sorted(draining))))
            self._ended.clear()
            self._view_changed = False
        effects, self._effects = self._effects, []
        return effects

    # ---- hearing and spreading ----------------------------------------------------------------------------------

    def _hear_all(self, updates: list[MemberUpdate], now: float) -> None:
        self.n_updates_refused += max(0, len(updates) - UPDATES_PER_GOSSIP_MAX)
        for update in updates[:UPDATES_PER_GOSSIP_MAX]:
            self._hear(update, now)

    def _hear(self, update: MemberUpdate, now: float) -> None:
        """Takes one update from outside: checked, and refuted when it is about this agent."""
        is_valid = MemberState.ALIVE <= update.state <= MemberState.DRAINING and 0 <= update.refutation < REFUTATION_MAX
        if not is_valid or len(update.info.agent_id) != AGENT_ID_BYTES:
            self.n_updates_refused += 1
        elif update.info.agent_id == self.agent_id:
            self._hear_of_self(update)
        else:
            self._learn(update, now)

    def _hear_of_self(self, update: MemberUpdate) -> None:
        if self.has_left or update.state in (MemberState.ALIVE, MemberState.DRAINING):
            return
        if update.refutation < self._own.refutation:
            self._news.repeat(self._own)  # whoever says so has missed the refutation
            return
        self.n_refutations += 1
        self._restate(MemberState(self._own.state), update.refutation + 1)

    def _restate(self, state: MemberState, refutation: int) -> None:
        self._own = MemberUpdate(self._own.info, state, refutation)
        self._news.spread(self._own)

    def _learn(self, update: MemberUpdate, now: float) -> Change:
        """Puts an update into the table, and passes it on if it was news."""
        agent_id = AgentId(update.info.agent_id)
        member = self._table.member(agent_id)
        was_draining = member is not None and member.is_draining
        change = self._table.apply(update, now, self._settings.suspicion_of(len(self._table) + 1))
        if change is Change.NONE:
            return change
        known = self._table.member(agent_id) or self._table.ended(agent_id)
        self._news.spread(known.update if known else update)
        if change in (Change.JOINED, Change.REVIVED):
            self._order.add(agent_id)
            self._view_changed = True
            if change is Change.REVIVED:
                self._newcomers.append(agent_id)
        elif change is Change.ENDED:
            self._order.remove(agent_id)
            self._probes.drop(agent_id)
            self._ended.add(agent_id)
            self._view_changed = True
        elif member is not None and member.is_draining != was_draining:
            self._view_changed = True
        return change

    def _declare(self, agent_id: AgentId, state: MemberState, now: float) -> None:
        """This agent's own judgement of a member believed alive."""
        member = self._table.member(agent_id)
        if member is not None:
            self._learn(MemberUpdate(member.update.info, state, member.update.refutation), now)

    def _tell_if_ended(self, agent_id: AgentId) -> None:
        """Somebody who is believed dead speaks: tell it, so that it can refute. Who has left is left alone."""
        ended = self._table.ended(agent_id)
        if ended is not None and ended.update.state == MemberState.DEAD:
            self._effects.append(Send(agent_id, Gossip([ended.update])))

    # ---- probing ------------------------------------------------------------------------------------------------

    def _run_probes(self, now: float) -> None:
        for probe in self._probes.take_late(now):
            self._ask_relays(probe)
        for probe in self._probes.take_failed(now):
            self._suspect(probe, now)
        if now < self._probe_at:
            return
        self._probe_at = max(self._probe_at + self._settings.probe_interval_s, now)
        target = self._order.next()
        if target is not None and target not in self._probes:
            relays_at = now + self._settings.probe_timeout_s
            deadline = relays_at + self._settings.indirect_timeout_s
            probe = Probe(target, self._next_sequence(), relays_at, deadline, is_verification=False)
            self._probes.start(probe)
            self._send_ping(target, probe.sequence)

    def _suspect(self, probe: Probe, now: float) -> None:
        """A probe failed: tell the others and the suspect itself. Evidence makes the time to refute shorter."""
        member = self._table.member(probe.target)
        if member is None:
            return
        if not member.is_suspect:
            self._declare(probe.target, MemberState.SUSPECT, now)
            self._effects.append(Send(probe.target, Gossip([member.update])))
        if probe.is_verification and member.dead_at is not None:
            member.suspect_until(min(member.dead_at, now + self._settings.verified_suspicion_s), now)

    def _run_suspicions(self, now: float) -> None:
        for agent_id, member in self._table.suspects():
            if member.dead_at is not None and member.dead_at <= now:
                self._declare(agent_id, MemberState.DEAD, now)
            elif member.ask_again_at is not None and member.ask_again_at <= now:
                member.ask_again_at = None
                self._send_ping(agent_id, self._next_sequence())

    def _run_repairs(self, now: float) -> None:
        if now >= self._dead_probe_at:
            self._dead_probe_at = now + self._settings.dead_probe_interval_s
            self._probe_a_dead(now)
        if now >= self._sync_at:
            self._sync_at = now + self._settings.sync_interval_s
            for agent_id in self._table.sample(self._rng, 1):
                self._effects += self._news.view_for(agent_id, self._own, now)
        if now >= self._seed_at:
            self._seed_at = now + self._seed_interval_s * (0.5 + self._rng.random())
            self._seed_interval_s = min(self._seed_interval_s * 2, self._settings.seed_interval_s)
            self._effects.append(JoinSeed())

    def _probe_a_dead(self, now: float) -> None:
        dead = self._table.revivable(now, self._settings.forget_s)
        if dead:
            target = dead[self._rng.randrange(len(dead))]
            self._send_ping(AgentId(target.info.agent_id), self._next_sequence())

    def _ask_relays(self, probe: Probe) -> None:
        for relay in self._table.sample(self._rng, self._settings.relays, besides=probe.target):
            request = PingRequest(probe.sequence, probe.target, self._news.piggyback(relay))
            self._effects.append(Send(relay, request))

    def _send_ping(self, target: AgentId, sequence: int) -> None:
        self._effects.append(Send(target, Ping(sequence, self._news.piggyback(target))))

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence
