"""Rollouts of backends, of Corral itself and of revisions of models, as people see them: `GET /api/rollouts/…`
(docs/reference/rollouts.md)."""

from __future__ import annotations

from corral.contract.codec import Message, always


class RolloutFigureView(Message, frozen=True):
    """One comparison of the new build with the old one."""

    name: str = always(str)  # errors, first_token, answer, tokens_per_s
    model: str = always(str)
    old: float = always(float)  # a share, seconds, or tokens per second
    new: float = always(float)
    old_requests: int = always(int)
    new_requests: int = always(int)
    limit: float = always(float)  # errors: how much the share may rise; else how many times as slow it may be
    certainty: float = 0.0  # that the new build is slower, in standard deviations; not for errors
    worse: bool = always(bool)
    words: str = always(str)


class RolloutWindowView(Message, frozen=True):
    """The requests of one build in one stretch of time."""

    at: float = always(float)  # seconds since 1970
    requests: int = always(int)
    errors: int = always(int)
    first_token_ms: float = always(float)  # medians; 0: unknown
    tokens_per_s: float = always(float)


class RolloutClassView(Message, frozen=True):
    """One hardware class: its first node switches, and is watched, before the others follow."""

    name: str = always(str)
    nodes: tuple[str, ...] = always(tuple)  # names
    canary: str = ""  # name of the node
    state: str = always(str)  # waiting, canary, soaking, passed
    passed: str = ""  # why the others may follow
    waiting: str = ""  # why the soak makes no progress
    soaked_s: float = 0.0
    deaths: int = 0  # processes of the new build that ended by themselves
    new_requests: int = 0
    old_requests: int = 0
    figures: tuple[RolloutFigureView, ...] = ()
    new_windows: tuple[RolloutWindowView, ...] = ()
    old_windows: tuple[RolloutWindowView, ...] = ()


class RolloutView(Message, frozen=True):
    operation_id: str = always(str)
    backend: str = always(str)
    phase: str = always(str)  # fetching, canary, soak, waves, done, reverted, ended
    started_at: str = always(str)
    ended_at: str = ""
    max_parallel: str = ""
    soak: str = ""  # 5m, or 200 requests
    max_errors: float = 0.0
    max_slowdown: float = 0.0
    min_requests: int = 0
    paused_by: str = ""
    promoted_by: str = ""
    aborted_by: str = ""
    verdict: str = ""  # why it was reverted
    reverted_by: tuple[str, ...] = ()  # operations that return nodes to their previous version
    message: str = ""  # the state in one sentence
    classes: tuple[RolloutClassView, ...] = ()
    model: str = ""  # whose new revision is on trial; `backend` is empty then
    revision: str = ""
    old_revision: str = ""
    percent: int = 0  # of the model's requests that the new revision gets now
    in_place: bool = False  # the new revision replaced the old one at once: no node holds both
    plan: str = ""  # which of the two, and why
    is_corral: bool = False  # a version of Corral itself; `backend` is `corral 1.2.0` then


class RolloutList(Message, frozen=True, omit_defaults=False):
    rollouts: tuple[RolloutView, ...] = ()
