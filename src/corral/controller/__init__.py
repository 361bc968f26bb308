"""The controller: registry, rules, health, admin API and the page. `main.py` is the place to start reading."""
