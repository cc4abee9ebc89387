"""Which signals stop a run."""

import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from patience import PATIENCE

import alload_jax.run.training as program
from alload_jax.errors import Terminated, run_command
from alload_jax.processes import quiet_imports
from alload_jax.run import main
from alload_jax.training.signals import StopRequest, _is_worth_saying, termination_as_interrupt


@pytest.fixture
def handlers():
    """Restores the handlers of this process after the test."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_next_one_is_left_to_the_handler_before(handlers, number):
    signal.signal(number, signal.default_int_handler)
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop.number == number
        if number == signal.SIGTERM:
            assert signal.getsignal(number) is signal.SIG_DFL
            return
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


@pytest.mark.parametrize(
    ("phase", "flags", "status"), [("read_data", (), 143), ("train", ("75",), 75)]
)
def test_sigterm_where_nothing_is_to_save_gives_the_status(
    handlers, monkeypatch, tmp_path, capsys, phase, flags, status
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, phase, lambda *_: signal.raise_signal(signal.SIGTERM))
    config = ["--config", str(Path(__file__).parents[2] / "configs" / "digits.yaml")]
    given = [part for flag in flags for part in ("--run.status_when_stopped", flag)]
    assert run_command(main, [*config, *given]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "SIGTERM: nothing was left to save; the same command goes on"


def test_ctrl_c_while_imports_run_is_left_to_the_system(handlers):
    for before, meanwhile in ((signal.default_int_handler, signal.SIG_DFL), 2 * (signal.SIG_IGN,)):
        signal.signal(signal.SIGINT, before)
        with quiet_imports():
            assert signal.getsignal(signal.SIGINT) is meanwhile
        assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_saves_has_sigterm_for_itself_and_a_background_job_ignores_ctrl_c(handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with termination_as_interrupt(143, pytest.fail):
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop
            signal.raise_signal(signal.SIGTERM)
            assert stop.number == signal.SIGTERM
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_closed_terminal_stops_a_run_which_saves_unless_it_runs_under_nohup(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequest() as stop:
        for _ in range(2):  # the terminal and its shell
            signal.raise_signal(signal.SIGHUP)
        assert stop.number == signal.SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop


PRINTING = """
import sys
from alload_jax.bench.harness import console
from alload_jax.errors import print_stderr, run_command
from alload_jax.processes import outlive_output

def main(argv):
    if sys.argv[1] == "table":
        console().print("saved")
    for _ in range(3):
        print("saved", "·" * 10000)
        print_stderr("saved")
    return 7

if sys.argv[1] == "run":
    outlive_output()
sys.exit(run_command(main, []))
"""


def test_a_run_outlives_the_reader_of_its_output():
    """As Ctrl-C ends `tee` before the run behind which it reads has saved."""
    reading, writing = os.pipe()
    os.close(reading)
    # 141: as of other programs in a shell
    for kind, status in (("run", 7), ("command", 141), ("table", 141)):
        command = [sys.executable, "-c", PRINTING, kind]
        done = subprocess.run(command, stdout=writing, stderr=writing, timeout=PATIENCE)
        assert done.returncode == status
    os.close(writing)


def test_a_run_needs_no_output():
    """As of a shell's `>&-`, and of a pipe that is full and does not wait."""
    command = [sys.executable, "-c", PRINTING, "run"]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, timeout=PATIENCE).returncode == 7
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(65_536))
    done = subprocess.run(command, stdout=writing, stderr=writing, timeout=PATIENCE)
    os.close(writing)
    os.close(reading)
    assert done.returncode == 7


SAVING = """
import sys, threading
from alload_jax.training.signals import silence_threads

async def save(): ...

silence_threads()
save()
print("saved", file=sys.stderr)
for file in ("/x/orbax/y.py", "/mine.py"):
    threading.Thread(target=exec, args=(compile("raise OSError", file, "exec"),)).start()
exec(compile("raise OSError", "/x/orbax/main.py", "exec"))
"""


def test_what_orbax_did_not_await_or_its_threads_raise_is_not_told():
    done = subprocess.run([sys.executable, "-c", SAVING], capture_output=True, timeout=PATIENCE)
    assert done.stderr.startswith(b"saved\n")
    files = re.findall(rb'File "/(mine|x/\S+)\.py"', done.stderr)
    assert sorted(files) == [b"mine", b"x/orbax/main"]


def test_commands_print_in_any_encoding():
    command, ascii = [sys.executable, "-c", PRINTING, ""], {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, env={**os.environ, **ascii}, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 7
    assert done.stdout.startswith(rb"saved \xb7")


IN_CPP = """
import ctypes, os, signal, threading
from alload_jax.training import signals
from alload_jax.training.signals import termination_as_interrupt

def terminate():
    c.pthread_mutex_lock(mutex)  # free once the main thread waits in C
    os.kill(os.getpid(), signal.SIGTERM)

signals.PATIENCE_SECONDS = 0.2
signal.signal(signal.SIGTERM, signal.SIG_DFL)
c, mutex, condition = ctypes.CDLL(None), *map(ctypes.create_string_buffer, (64, 64))
with termination_as_interrupt(75, os._exit):
    c.pthread_mutex_lock(mutex)
    threading.Thread(target=terminate, daemon=True).start()
    c.pthread_cond_wait(condition, mutex)  # never returns, and no signal wakes it up
"""


DROPPED = """
import os, signal, sys, time, weakref
from alload_jax.errors import run_command
from alload_jax.training.signals import termination_as_interrupt

class Kept:
    pass

class Destroyed:
    def __del__(self):
        signal.raise_signal(number)

def main(argv):
    kept = Kept()
    with termination_as_interrupt(75, os._exit):
        if argv == ["callback"]:
            of = weakref.ref(kept, lambda _: signal.raise_signal(number))
            del kept
        else:
            Destroyed()
        time.sleep(600)

place, number = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run_command(main, [place]))
"""


@pytest.mark.parametrize(
    ("script", "place", "number", "status", "said"),
    [
        (DROPPED, "callback", signal.SIGINT, 130, "interrupted\n"),
        (DROPPED, "destructor", signal.SIGTERM, -signal.SIGTERM, ""),
        (IN_CPP, "", signal.SIGTERM, 75, "SIGTERM: nothing was left to save"),
    ],
)
def test_a_signal_ends_a_command_where_python_drops_it_or_does_not_see_it(
    script, place, number, status, said
):
    command = [sys.executable, "-c", script, place, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == (said != "")


@pytest.mark.parametrize("saving", [False, True])
def test_sigterm_ends_the_first_process_of_a_container(saving):
    """Where it waits for other processes, and for the second time where it saves."""
    code = f"""if True:
        import os, sys, time
        from alload_jax.errors import run_command
        from alload_jax.training.signals import StopRequest

        def main(argv):
            with StopRequest() if {saving} else open(os.devnull):
                os.kill(1, 15)
                print(end="first", flush=True)
                os.kill(1, 15)
                time.sleep(1)

        sys.exit(run_command(main, []))
    """
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.stderr.startswith("unshare"):
        pytest.skip("only root can make namespaces")
    assert (done.returncode, done.stderr) == (143, "")
    assert done.stdout.endswith("first") == saving


def test_what_libraries_log_stays_out_of_the_terminal():
    """Orbax warns of slow disks and of what a kill has left, in words that no user can act on."""
    for level in (logging.WARNING, logging.ERROR):
        for place, said in (("/x/orbax/checkpoint/manager.py", False), ("/x/mine.py", True)):
            record = logging.LogRecord("absl", level, place, 1, "Waiting for", (), None)
            assert _is_worth_saying(record) == said
