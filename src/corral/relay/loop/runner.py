"""Runs a handler's coroutine at once, in the stack that parsed its request, without a turn of the event loop.

A task per request costs two turns through the loop's ready queue, a third of the cost of relaying a request. A `Runner`
starts the coroutine in the caller's stack. While the coroutine waits for the relay (a `Park`), the code that has the
result resumes it directly; while it waits for anything else it behaves like a task. For `asyncio.timeout`, task groups
and the like it is the current task: asyncio documents this interface for other implementations of tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio.tasks import _enter_task, _leave_task  # documented under "Extending asyncio"
from collections.abc import Coroutine, Generator
from typing import Any


class Park:
    """Something to wait for that only the relay can end, as threads park. `await` it only in the runner's coroutine."""

    __slots__ = ()

    def __await__(self) -> Generator[Park, Any, Any]:
        return (yield self)


class Runner:
    """A replacement for `asyncio.Task`. A subclass sets `loop` and implements `on_finished`."""

    loop: asyncio.AbstractEventLoop
    parked: Park | None = None
    stepping = False  # true exactly while the coroutine's own code runs
    # Few requests set these: defaults of the class cost nothing.
    _coro: Coroutine[Any, Any, None] | None = None
    _context: contextvars.Context
    _waiting: asyncio.Future[Any] | None = None
    _elsewhere: dict[Park, asyncio.Future[Any]] | None = None
    _must_cancel = False
    _cancels = 0

    def run(self, coro: Coroutine[Any, Any, None]) -> None:
        """Once. May run to the end before it returns."""
        self._coro = coro
        self._context = contextvars.copy_context()  # what one request binds, the next must not see
        self._step(None)

    def on_finished(self, failure: BaseException | None) -> None:
        raise NotImplementedError

    # Waiting for the relay.

    async def wait(self, park: Park) -> Any:
        """Wait until `wake(park, value)`; also in a task that the handler has started."""
        if self.stepping:
            return await park
        if self._elsewhere is None:
            self._elsewhere = {}
        if park in self._elsewhere:
            raise RuntimeError("two tasks wait for the same event of one request")
        future = self._elsewhere[park] = self.loop.create_future()
        try:
            return await future
        finally:
            del self._elsewhere[park]

    def waits_for(self, park: Park) -> bool:
        return self.parked is park or (self._elsewhere is not None and park in self._elsewhere)

    def wake(self, park: Park, value: object = None) -> None:
        """The last step of a caller: the handler may run to its end before this returns."""
        if self.parked is park:
            self.parked = None
            self._step(value)
        elif self._elsewhere is not None and park in self._elsewhere:
            future = self._elsewhere[park]
            if not future.done():
                future.set_result(value)

    def wake_with(self, park: Park, error: BaseException) -> None:
        if self.parked is park:
            self.parked = None
            self._step(None, error)
        elif self._elsewhere is not None and park in self._elsewhere:
            future = self._elsewhere[park]
            if not future.done():
                future.set_exception(error)

    # Stepping.

    def _step(self, value: object, error: BaseException | None = None) -> None:
        coro, loop = self._coro, self.loop
        if coro is None:
            return
        try:
            _enter_task(loop, self)  # type: ignore[arg-type]
        except RuntimeError:  # another task is running right now: wait for the loop
            loop.call_soon(self._step, value, error)
            return
        if self._must_cancel:
            self._must_cancel = False
            error = asyncio.CancelledError()
        self.stepping = True
        try:
            run = self._context.run
            yielded = run(coro.send, value) if error is None else run(coro.throw, error)
        except StopIteration:
            failure: BaseException | None = None
        except BaseException as raised:
            failure = raised
        else:
            self.stepping = False
            _leave_task(loop, self)  # type: ignore[arg-type]
            if type(yielded) is Park:
                self.parked = yielded
            else:
                self._wait_for(yielded)
            return
        self.stepping = False
        _leave_task(loop, self)  # type: ignore[arg-type]
        self._coro = None
        self.on_finished(failure)
        if failure is not None and isinstance(failure, KeyboardInterrupt | SystemExit):
            raise failure

    def _wait_for(self, yielded: Any) -> None:
        if yielded is None:  # a bare yield: asyncio.sleep(0)
            self.loop.call_soon(self._step, None)
            return
        if getattr(yielded, "_asyncio_future_blocking", None) is not True:
            wrong = RuntimeError(f"a handler awaited an object that is not an asyncio future: {yielded!r}")
            self.loop.call_soon(self._step, None, wrong)
            return
        yielded._asyncio_future_blocking = False
        self._waiting = yielded
        yielded.add_done_callback(self._wake)
        if self._must_cancel and yielded.cancel():
            self._must_cancel = False

    def _wake(self, _future: asyncio.Future[Any]) -> None:
        self._waiting = None
        self._step(None)  # the awaited future raises or returns its own result

    def _cancel_parked(self) -> None:
        if self.parked is not None and self._must_cancel:
            self.parked = None
            self._step(None)

    # The interface that asyncio expects of a current task.

    def cancel(self, msg: object = None) -> bool:
        if self._coro is None:
            return False
        self._cancels += 1
        if self._waiting is not None and self._waiting.cancel(msg):
            return True
        self._must_cancel = True
        self.loop.call_soon(self._cancel_parked)  # where it is parked by then
        return True

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        if self._cancels:
            self._cancels -= 1
        return self._cancels

    def done(self) -> bool:
        return self._coro is None

    def get_coro(self) -> Coroutine[Any, Any, None] | None:
        return self._coro

    def get_context(self) -> contextvars.Context:
        return self._context

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def get_name(self) -> str:
        return "relay-request"
