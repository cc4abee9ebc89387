import json

import pytest


@pytest.fixture
def figures(alload):
    """Runs `alload plan --json` and returns its JSON."""

    def run(*argv):
        status, out, err = alload("plan", *argv, "--json")
        assert (status, err) == (0, "")
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return run
