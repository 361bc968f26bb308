"""Rollouts: in which order nodes switch to something new, and whether what they serve is as good as before."""
