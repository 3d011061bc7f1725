"""A small machine with RDMA devices, for hosts that have none."""
