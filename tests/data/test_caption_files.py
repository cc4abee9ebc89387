"""Captions land on their own sample, or the file is refused: dots, duplicates, cases, Unicode."""

import contextlib
import unicodedata
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.prepare.captions import CaptionFiles
from alload_jax.data.prepare.sources import UnusableError

COMPOSED, DECOMPOSED = "é", "e\u0301"
STEMS = st.sampled_from(
    ["a", "A", "b", "a.v1", "a.v1.0", "a.v1.1", "a b", "a.mp4", "x/a", COMPOSED, DECOMPOSED]
)
NAMES = st.builds("{}{}".format, STEMS, st.sampled_from([".mp4", ".MP4", ".png", ".txt", ".TXT"]))


def base(name):
    return name.rpartition(".")[0]


def composed(name):
    """The name in one Unicode form, with its suffix in lower case."""
    stem, dot, suffix = unicodedata.normalize("NFC", name).rpartition(".")
    return f"{stem}.{suffix.lower()}" if dot else suffix


def first_dot(name):
    folder, slash, last = unicodedata.normalize("NFC", name).rpartition("/")
    return folder + slash + last.partition(".")[0]


def paired(names, **options):
    """The caption file of each name of media; "refused" where none can be told."""
    found, files = {}, CaptionFiles(names, **options)
    for name in names:
        if not name.lower().endswith(".txt"):
            found[name] = "refused"
            with contextlib.suppress(UnusableError):
                found[name] = files.of(name)
    return found


@settings(max_examples=80)
@given(st.lists(NAMES, max_size=8), st.booleans(), st.randoms())
def test_a_caption_lands_on_no_other_sample_whatever_the_order(names, in_archive, chance):
    names = names if in_archive else list(dict.fromkeys(names))
    texts = [name for name in names if name.lower().endswith(".txt")]
    media = [name for name in names if name not in texts]
    found = paired(names, by_first_dot=in_archive)
    kinds = Counter((base(name), name.lower()) for name in media)
    for name, text in found.items():
        own = [one for one in texts if base(one) == base(name)]
        alone = kinds[base(name), name.lower()] == 1
        if len(own) == 1 and alone and name + ".txt" not in texts and base(name) not in media:
            assert text == own[0]
        if len(own) > 1 or (own and not alone) or media.count(name) > 1:
            assert text == "refused"
        if text not in (None, "refused"):
            rivals = {base(one) for one in media} - {base(name)} | set(media) - {name}
            assert base(text) not in rivals or base(text) in (base(name), name)
            assert first_dot(text) == first_dot(name)
            assert in_archive or composed(base(text)) in (composed(base(name)), composed(name))
    chance.shuffle(names)
    assert paired(names, by_first_dot=in_archive) == found


def test_members_of_archives():
    for names, expected in (
        (["a.mp4", "a.caption.txt"], {"a.mp4": "a.caption.txt"}),
        (["a.video.mp4", "a.words.txt"], {"a.video.mp4": "a.words.txt"}),
        (["a.jpg", "a.mp4", "a.txt"], {"a.jpg": "a.txt", "a.mp4": "a.txt"}),
        (["a.mp4", "a.txt", "a.bad.txt"], {"a.mp4": "a.txt"}),
        (["a.mp4", "a.good.txt", "a.bad.txt"], {"a.mp4": "refused"}),
        (["a.1.mp4", "a.2.mp4", "a.txt"], {"a.1.mp4": "refused", "a.2.mp4": "refused"}),
        (["a.1.mp4", "a.2.mp4", "a.1.txt"], {"a.1.mp4": "a.1.txt", "a.2.mp4": None}),
        (["a.1.mp4", "a.2.mp4"], {"a.1.mp4": None, "a.2.mp4": None}),
        (["a.mp4", "a.mp4", "a.txt"], {"a.mp4": "refused"}),
        (["a.mp4", "a.txt", "a.txt"], {"a.mp4": "refused"}),
        (["a.mp4", "A.txt"], {"a.mp4": None}),
        (["a.mp4", "x/a.txt"], {"a.mp4": None}),
        (["A.MP4", "A.TXT"], {"A.MP4": "A.TXT"}),
        (["a.MP4", "a.mp4", "a.txt"], {"a.MP4": "refused", "a.mp4": "refused"}),
        ([".a.mp4", ".b.txt"], {".a.mp4": None}),
    ):
        assert paired(names, by_first_dot=True) == expected


def test_a_name_from_macos_finds_its_caption():
    names = [f"{DECOMPOSED}.mp4", f"{COMPOSED}.txt"]
    assert paired(names) == {names[0]: names[1]}
    # A caption that fits one name letter by letter is not that of the other.
    names.append(f"{COMPOSED}.mp4")
    assert paired(names) == {f"{DECOMPOSED}.mp4": None, f"{COMPOSED}.mp4": f"{COMPOSED}.txt"}
