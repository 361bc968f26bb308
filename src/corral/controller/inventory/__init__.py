"""What nodes report: installed backends, running processes, files, activity."""
