"""HTTP routes: they parse requests, check rights and call a service, which decides."""
