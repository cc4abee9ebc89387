"""Messages on how to resume a run."""

import sys
from pathlib import Path

from alload_jax.distributed.initialize import ClusterConfig


def program() -> str:
    """Returns how the training program was started, such as `python train.py`."""
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.parent.name != "alload_jax":
        return f"python {script.name if script.name == 'train.py' else script}"
    return "alload train" if sys.argv[1:2] == ["train"] else "python train.py"


def resume_command(folder: Path, cluster: ClusterConfig) -> str:
    """Returns the command that resumes a run; in a cluster, the command of each process."""
    command = f"{program()} --config {folder / 'config.yaml'}"
    if cluster.processes is None:
        return command
    return (
        f"{command} --cluster.coordinator {cluster.coordinator} --cluster.processes "
        f"{cluster.processes} --cluster.process <0 to {cluster.processes - 1}>"
    )


def continue_with(folder: Path, cluster: ClusterConfig) -> str:
    """Returns how to resume a run that has stopped, or that had not begun."""
    if not (folder / "config.yaml").exists():
        return "start it again with the same command"
    return f"continue with: {resume_command(folder, cluster)}"


def after_loss(folder: Path, cluster: ClusterConfig) -> str:
    """Returns what to do after a process is lost, and the step that the run resumes from."""
    if not (folder / "config.yaml").exists():
        return "start all processes again"
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    saved = max((int(name) for name in names if name.isdigit()), default=0)
    command = resume_command(folder, cluster)
    return f"start all processes again with: {command} (continues from step {saved})"
