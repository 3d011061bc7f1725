"""Tests of the fault injector itself; those of agents behind it are in processes/test_chaos.py."""
