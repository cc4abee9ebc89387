"""Defaults are added once, and the user's flags take precedence."""

from alload_jax.sharding.xla_flags import OVERLAP_FLAGS, with_defaults


def test_defaults_are_added_to_the_flags_given():
    (name, value), *_ = OVERLAP_FLAGS.items()
    assert with_defaults("") == " ".join(f"--{n}={v}" for n, v in OVERLAP_FLAGS.items())
    assert with_defaults("--xla_dump_to=there").split()[0] == "--xla_dump_to=there"
    assert f"--{name}={value}" in with_defaults("--xla_dump_to=there").split()


def test_flags_given_take_precedence():
    (name, _), *_ = OVERLAP_FLAGS.items()
    assert with_defaults(f"--{name}=false") == f"--{name}=false"
    assert with_defaults(with_defaults("")) == with_defaults("")
