"""`alload`, whose preparation waits where some shards are finished, so that tests interrupt it.

The variable HELD has their number and the path of a file; without that file, it does not wait.
"""

import os
import time
from pathlib import Path

from alload_jax import cli
from alload_jax.data.prepare import pipeline
from alload_jax.data.prepare.unit import Job
from alload_jax.data.store.files import partial_folder


class HeldJob(Job):
    def call(self, name, method, *arguments):
        shards, held = os.environ["HELD"].split(" ", 1)
        while Path(held).exists() and finished(self.out) >= int(shards):
            time.sleep(0.01)
        return super().call(name, method, *arguments)


def finished(out):
    return len(list(partial_folder(out).glob("shard-*.parquet")))


pipeline.Job = HeldJob

if __name__ == "__main__":
    cli.entry()
