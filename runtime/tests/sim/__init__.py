"""The simulation of a whole cluster, and the mistakes that it must find."""
