"""Defaults are added once, and the user's flags take precedence."""

from alload_jax.sharding.xla_flags import DEFAULT_FLAGS, with_defaults


def test_defaults_are_added_to_the_flags_given():
    (name, value), *_ = DEFAULT_FLAGS.items()
    assert with_defaults("") == " ".join(f"--{n}={v}" for n, v in DEFAULT_FLAGS.items())
    assert with_defaults("--xla_dump_to=there").split()[0] == "--xla_dump_to=there"
    assert f"--{name}={value}" in with_defaults("--xla_dump_to=there").split()


def test_the_path_of_a_file_of_flags_stays_as_it_is():
    assert with_defaults("my/flags.txt") == "my/flags.txt"


def test_flags_given_take_precedence():
    (name, _), *_ = DEFAULT_FLAGS.items()
    assert with_defaults(f"--{name}=false").split().count(f"--{name}=false") == 1
    assert f"--{name}=true" not in with_defaults(f"--{name}=false")
    assert with_defaults(with_defaults("")) == with_defaults("")
