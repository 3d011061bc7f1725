"""The agent: composition root, tasks, sockets, TLS, configuration, metrics endpoint."""
