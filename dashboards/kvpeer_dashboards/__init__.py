"""Grafana dashboards and Prometheus rules of kvpeer: how they are made, and what they ask."""
