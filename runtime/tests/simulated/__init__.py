"""Many machines in one thread under a seed: virtual time and a hostile network."""
