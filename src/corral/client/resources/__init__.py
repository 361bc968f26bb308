"""One class per resource of the HTTP API, each built on `Client.call`."""
