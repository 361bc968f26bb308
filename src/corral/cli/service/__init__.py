"""`corral service`: runs Corral as a service of systemd or launchd, from the start of the machine on."""
