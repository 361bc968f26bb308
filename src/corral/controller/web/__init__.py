"""The web pages: templates, scripts, style sheets. They show what the admin API shows, and no more."""
