"""What is set is set once, and what the user says stands."""

from alload_jax.sharding.xla_flags import OVERLAP, overlapping


def test_flags_are_added_beside_those_given():
    (name, value), *_ = OVERLAP.items()
    assert overlapping("") == " ".join(f"--{n}={v}" for n, v in OVERLAP.items())
    assert overlapping("--xla_dump_to=there").split()[0] == "--xla_dump_to=there"
    assert f"--{name}={value}" in overlapping("--xla_dump_to=there").split()


def test_what_the_user_says_stands():
    (name, _), *_ = OVERLAP.items()
    assert overlapping(f"--{name}=false") == f"--{name}=false"
    assert overlapping(overlapping("")) == overlapping("")
