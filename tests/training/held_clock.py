"""train.py, where time begins for the watchdog and for heartbeats as a file appears.

The variable TIME_BEGINS has its path. Until then, a busy machine may take any time.
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from alload_jax.processes import quiet_imports

with quiet_imports():
    from alload_jax.distributed import cluster
    from alload_jax.run import entry
    from alload_jax.training.callbacks.watchdog import Watchdog


class Clock:
    began = None

    def __call__(self):
        if self.began is None and Path(os.environ["TIME_BEGINS"]).exists():
            self.began = time.monotonic()
        return 0.0 if self.began is None else time.monotonic() - self.began


clock = Clock()
cluster.time = SimpleNamespace(monotonic=clock, sleep=time.sleep)
Watchdog.__init__.__defaults__ = (clock, os._exit)

if __name__ == "__main__":
    sys.argv[0] = "train.py"
    entry()
