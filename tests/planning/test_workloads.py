import numpy as np
import pytest
from planning_cases import refusal

from alload_jax.planning.samples import Geometry
from alload_jax.planning.workloads import AREAS, ASPECT_RATIOS, make_workload, names

MANY = 100_000


def frames_of(samples):
    return samples.shape[:, 0]


def share(mask):
    return float(mask.mean())


def of_area(samples, area):
    """Samples whose frames are nearest to that area class."""
    pixels = samples.shape[:, 1] * samples.shape[:, 2]
    distance = np.abs(np.log(pixels[:, None] / np.array(list(AREAS.values()))))
    return distance.argmin(axis=1) == list(AREAS).index(area)


@pytest.mark.parametrize("name", names())
def test_sizes_are_those_of_wan_tokens_follow_the_formula_and_samples_the_seed(name):
    samples, again, other = (make_workload(name, 5000, seed) for seed in (3, 3, 4))
    frames, height, width = samples.shape.T
    assert (frames % 4 == 1).all()
    assert (height % 16 == 0).all()
    assert (width % 16 == 0).all()
    assert (samples.seq_len == ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)).all()
    assert (samples.shape == again.shape).all()
    assert (samples.shape != other.shape).any()


def test_another_geometry_gives_other_lengths_and_what_is_no_workload_is_refused():
    coarse = Geometry((4, 16, 16), (1, 2, 2))
    samples, other = make_workload("wan-480p", 100), make_workload("wan-480p", 100, 0, coarse)
    assert (samples.shape == other.shape).all()
    assert (other.seq_len < samples.seq_len).all()
    assert "wan-480p" in refusal(make_workload, "wan-481p", 10)
    assert "at least 1" in refusal(make_workload, "wan-480p", 0)


def test_wan_480p_has_the_shares_of_the_table():
    samples = make_workload("wan-480p", MANY)
    frames = frames_of(samples)
    assert of_area(samples, "480p").all()
    assert share(frames == 1) == pytest.approx(0.5, abs=0.01)
    assert share(frames == 81) == pytest.approx(0.3, abs=0.01)
    for count in range(17, 78, 4):
        assert share(frames == count) == pytest.approx(0.2 / 16, abs=0.002)
    assert set(np.unique(frames)) == {1, 81, *range(17, 78, 4)}


def test_mixed_resolution_has_the_shares_of_the_table():
    samples = make_workload("mixed-resolution", MANY)
    frames, image = frames_of(samples), frames_of(samples) == 1
    # 192p and 256p frames are about as large; only the latter are images.
    expected = {"512p": 0.10, "480p": 0.10, "720p": 0.05}
    for area, part in expected.items():
        assert share(image & of_area(samples, area)) == pytest.approx(part, abs=0.006)
    small = samples.shape[:, 1] * samples.shape[:, 2] < 100_000
    assert share(image & small) == pytest.approx(0.10, abs=0.006)
    assert share((frames == 81) & small) == pytest.approx(0.20, abs=0.006)
    for area, part in {"480p": 0.30, "720p": 0.15}.items():
        for count in (17, 33, 49, 65, 81):
            found = share((frames == count) & of_area(samples, area))
            assert found == pytest.approx(part / 5, abs=0.005)


@pytest.mark.parametrize("percent", [35, 60])
def test_the_name_of_a_long_video_workload_is_the_share_of_tokens_that_is_video(percent):
    samples = make_workload(f"long-video-V{percent}", MANY)
    video = frames_of(samples) == 161
    tokens = samples.seq_len[video].sum() / samples.seq_len.sum()
    assert tokens == pytest.approx(percent / 100, abs=0.02)
    for area in ("480p", "720p", "1080p"):
        assert share(of_area(samples, area)[video]) == pytest.approx(1 / 3, abs=0.03)
    for area in ("480p", "720p", "1080p"):
        assert share(of_area(samples, area)[~video]) == pytest.approx(1 / 4, abs=0.01)


def test_aspect_ratios_come_by_their_weights_and_are_a_parameter():
    samples = make_workload("wan-480p", MANY)
    _, height, width = samples.shape.T
    for (w, h), weight in ASPECT_RATIOS.items():
        near = np.abs(np.log(width / height * h / w)) < 0.07
        expected = weight / sum(ASPECT_RATIOS.values())
        assert share(near) == pytest.approx(expected, abs=0.01)
    square = make_workload("wan-480p", 100, aspect_ratios={(1, 1): 1.0})
    assert (square.shape[:, 1] == square.shape[:, 2]).all()
