"""Who is alive, busy or gone."""
