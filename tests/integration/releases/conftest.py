from __future__ import annotations

from tests.support.both_stores import fleet, local_fleet, postgres, postgres_url

__all__ = ["fleet", "local_fleet", "postgres", "postgres_url"]
