"""The conformance suite: every promise of the contract that binds a backend, as tests.

``suite`` is the pytest class, ``clauses`` the list of what is promised, the other modules hold
the tests, section by section of the contract. Knows the collective interface and no backend.
Ranks import the modules of tests, so only ``suite`` and ``report`` may import pytest.
"""
