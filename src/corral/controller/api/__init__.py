"""HTTP doors: they parse, check rights and call a service. Nothing is decided here."""
