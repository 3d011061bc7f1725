"""Bytes <-> values: frames and messages of the control channel and of the client socket. No sockets here."""
