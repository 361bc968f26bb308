"""Everything that exists only for LocalAI controllers. A worker without this package serves Corral controllers."""
