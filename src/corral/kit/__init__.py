"""Tools that know nothing of the domain: clock, backoff, tasks, errors, settings, secrets, logging."""
