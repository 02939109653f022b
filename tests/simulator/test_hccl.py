"""Collectives between simulated devices, in real processes started as users start them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simulated")]
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def no_segment_is_left() -> Iterator[None]:
    def segments() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("npu_patch_hccl.*")}

    before = segments()
    yield
    assert segments() <= before


@pytest.fixture
def segment_of_a_dead_job() -> Iterator[Path]:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = Path(f"/dev/shm/npu_patch_hccl.{ended.pid}.0.1")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_collectives_ddp_dtensor_and_fsdp2_on_two_devices(segment_of_a_dead_job: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # The launcher itself needs no device; its workers load the simulated one.
    env = environment(NPU_PATCH_SIMULATE="2", TORCH_DEVICE_BACKEND_AUTOLOAD="0", OMP_NUM_THREADS="1")
    result = subprocess.run(
        [*command, str(SCRIPTS / "collectives.py")], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("is done") == 2
    assert not segment_of_a_dead_job.exists()


def two_ranks(action: str, **changes: str) -> list[subprocess.Popen[str]]:
    """Without a launcher, which would end the survivor itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"NPU_PATCH_SIMULATE": "2", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "stuck.py"), action],
            env=environment(**common, **where, **changes, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_a_killed_rank_fails_the_other_in_seconds() -> None:
    first, second = two_ranks("killed")
    try:
        second.communicate(timeout=120)
        assert second.returncode == -signal.SIGKILL
        killed = time.monotonic()
        out, err = first.communicate(timeout=60)
        assert time.monotonic() - killed < 30
        assert "failed:" in out, err
        assert "of a peer has ended" in err
    finally:
        first.kill()


def test_a_rank_that_never_joins_fails_the_other_after_the_timeout() -> None:
    first, second = two_ranks("hanging", NPU_PATCH_HCCL_TIMEOUT="3")
    try:
        out, err = first.communicate(timeout=120)
        assert "failed:" in out, err
        assert "a peer did not join within 3 s" in err
    finally:
        first.kill()
        second.kill()
        second.communicate()
