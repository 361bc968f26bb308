"""The page people look at: templates, one script, one style sheet. It shows what the admin API shows and no more."""
