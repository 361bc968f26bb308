"""One file per migration; the number in its name is its revision."""
