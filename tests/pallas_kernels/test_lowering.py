"""Kernels that are lowered once: in a process, and on disk."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from alload_jax.sharding.mesh import MeshConfig, make_mesh
from pallas_kernels import lowering
from pallas_kernels.lowering import lowered_once


class Kernel:
    """Doubles, and sums rows; counts how often it is traced."""

    traced = 0

    def __call__(self, x):
        self.traced += 1
        return 2 * x, x.sum(axis=1)


@pytest.fixture
def kernel(monkeypatch):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(lowering, "_PLATFORM", "cpu")
    restarted(monkeypatch)
    yield Kernel()
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def folder(kernel, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    return tmp_path


def check(kernel, rows=3, static="one", wrap=lambda run: run):
    x = np.arange(4.0 * rows, dtype=np.float32).reshape(rows, 4)
    run = wrap(lambda x: lowered_once("double", static, kernel, [x]))
    doubled, sums = jax.jit(run)(x)
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(sums, x.sum(axis=1))


def restarted(monkeypatch):
    monkeypatch.setattr(lowering, "_KERNELS", {})


def test_a_kernel_is_lowered_once_for_all_programs_and_again_for_others(kernel):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: check(kernel), range(8)))
    assert kernel.traced == 1
    check(kernel, rows=2)
    check(kernel, static="two")
    assert kernel.traced == 3


def test_a_mesh_around_it_is_no_part_of_it(kernel):
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    axes = tuple(mesh.axis_names)

    def split(run):
        specs = {"in_specs": P(axes), "out_specs": P(axes)}
        return jax.shard_map(run, mesh=mesh, check_vma=False, **specs)

    check(kernel, rows=6, wrap=split)
    check(kernel)
    check(kernel, rows=6, wrap=split)
    assert kernel.traced == 1
    text = jax.jit(lambda x: lowered_once("double", "one", kernel, [x])).lower(jnp.ones((3, 4)))
    assert "double" in text.as_text()


def test_it_stands_in_maps_and_loops(kernel):
    x = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)

    def run(x):
        return lowered_once("double", "one", kernel, [x])[0]

    np.testing.assert_array_equal(jax.vmap(run)(x), 2 * x)
    nested = jax.jit(jax.vmap(jax.vmap(run, 1, 1)))(x[None].swapaxes(1, 2))
    np.testing.assert_array_equal(nested, 2 * x[None].swapaxes(1, 2))
    _, scanned = jax.lax.scan(lambda count, x: (count, jax.checkpoint(run)(x)), 0, x)
    np.testing.assert_array_equal(scanned, 2 * x)
    assert kernel.traced == 1


def test_it_is_kept_beside_the_compiled_programs(kernel, folder, monkeypatch):
    check(kernel)
    restarted(monkeypatch)
    check(kernel)
    assert kernel.traced == 1
    (file,) = (folder / "pallas_kernels").iterdir()
    for damaged in (b"", file.read_bytes()[:-1], file.read_bytes()[:40] + b"?" * 200):
        file.write_bytes(damaged)
        restarted(monkeypatch)
        before = kernel.traced
        check(kernel)
        assert kernel.traced == before + 1
    restarted(monkeypatch)
    monkeypatch.setattr(lowering, "versions", lambda: "of other code")
    check(kernel)
    assert kernel.traced == 5
    assert len(list((folder / "pallas_kernels").iterdir())) == 2


def test_of_two_processes_both_take_what_the_first_has_written(kernel, folder, monkeypatch):
    check(kernel)
    (file,) = (folder / "pallas_kernels").iterdir()
    written, read = file.read_bytes(), lowering._read
    restarted(monkeypatch)
    answers = iter([lambda _: None])  # it is not there yet; and is when this one writes
    monkeypatch.setattr(lowering, "_read", lambda path: next(answers, read)(path))
    monkeypatch.setattr(lowering, "_export", lambda *_: SimpleNamespace(serialize=lambda: b"2"))
    check(kernel)
    assert [each.read_bytes() for each in file.parent.iterdir()] == [written]


def test_of_two_hosts_whose_processes_have_one_number_the_second_changes_nothing(
    folder, monkeypatch
):
    path, link = folder / "pallas_kernels" / "double", os.link
    monkeypatch.setattr(lowering.export, "deserialize", bytes)

    def link_and_meet(new, path):
        monkeypatch.setattr(os, "link", link)
        link(new, path)
        lowering._write(path, b"second")  # before the first has removed its other name

    monkeypatch.setattr(os, "link", link_and_meet)
    lowering._write(path, b"first")
    assert lowering._read(path) == b"first"


def test_without_links_the_first_stays_too(folder, monkeypatch):
    path = folder / "pallas_kernels" / "double"
    monkeypatch.setattr(lowering.export, "deserialize", bytes)
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError("no links")))
    for content in (b"first", b"second"):
        lowering._write(path, content)
        assert lowering._read(path) == b"first"
    path.write_bytes(b"damaged")
    lowering._write(path, b"second")
    assert lowering._read(path) == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_is_said_and_keeps_nothing(folder, monkeypatch):
    def write_bytes(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lowering.Path, "write_bytes", write_bytes)
    with pytest.warns(UserWarning, match="double cannot be written .*No space left"):
        lowering._write(folder / "pallas_kernels" / "double", b"first")
    assert not list((folder / "pallas_kernels").iterdir())


@pytest.mark.parametrize("name", ["", "gs://bucket/programs", "removed"])
def test_without_a_folder_nothing_is_kept(kernel, folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    jax.config.update(
        "jax_compilation_cache_dir", str(folder / name) if name == "removed" else name
    )
    check(kernel)
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_said(kernel, folder):
    (folder / "pallas_kernels").touch()
    with pytest.warns(UserWarning, match="pallas_kernels.* cannot be written"):
        check(kernel)


def test_a_folder_that_goes_meanwhile_does_no_harm(kernel, folder, monkeypatch):
    export = lowering._export
    monkeypatch.setattr(lowering, "_export", lambda *a: (export(*a), shutil.rmtree(folder))[0])
    check(kernel)
    assert not folder.exists()
