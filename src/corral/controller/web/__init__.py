"""The pages people look at: templates, small scripts, style sheets. They show what the admin API shows and no more."""
