"""What the operating system gives to backends: users, shared libraries, packages."""
