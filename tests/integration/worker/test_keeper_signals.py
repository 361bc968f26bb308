"""A signal to stop reaches a worker that becomes a keeper, at every moment of that change."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.processes import Process, clean_env
from tests.support.waiting import until

# Two workers of which only this is real: signals, the successor's start, and the change into a keeper.
WORKERS = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from corral.worker import main
    from corral.worker.reload import handover
    from corral.worker.settings import WorkerSettings
    from corral.worker.settings.node import NodeSettings

    folder, moment = Path(sys.argv[1]), sys.argv[2]

    async def serve(settings, *, stopped, hurry, succeeds, given, watch):
        if succeeds:
            (folder / "serves").touch()
            await stopped.wait()
            (folder / "stopped").touch()
            return False
        os.kill(os.getpid(), signal.SIGUSR2)
        while not (folder / "serves").exists():
            await asyncio.sleep(0.01)
        return True

    def ask_to_stop(then, first_word=None):
        def ask(*words, **more):
            if not succeeds and first_word in (None, words[0]):
                (folder / "asked").touch()
                os.kill(os.getpid(), signal.SIGTERM)
            return then(*words, **more)
        return ask

    succeeds = handover.keeper.SUCCEED in os.environ
    main.serve = serve
    if moment == "before":
        main.log.info = ask_to_stop(main.log.info, "worker has handed over")
    elif moment == "amid":
        signal.pthread_sigmask = ask_to_stop(signal.pthread_sigmask)
    else:
        os.execv = ask_to_stop(os.execv)
    sys.exit(main.run(WorkerSettings(NodeSettings(controller="http://127.0.0.1:1", data=folder))))
"""


@pytest.mark.parametrize("moment", ["before", "amid", "after"])
async def test_a_worker_that_becomes_a_keeper_hears_that_it_is_to_stop(tmp_path: Path, moment: str) -> None:
    script = tmp_path / "workers.py"
    script.write_text(textwrap.dedent(WORKERS))
    process = Process([sys.executable, str(script), str(tmp_path), moment], clean_env(tmp_path), tmp_path / "log")
    try:
        await until(lambda: not process.running)
        assert process.wait() == 0, process.output()
    finally:
        process.close()
    assert (tmp_path / "asked").exists()
    assert (tmp_path / "stopped").exists(), "the one that serves was told"
