"""One gateway in several processes (`--processes N`, ADR 0018).

A parent owns the listening sockets, reads the view of the fleet and keeps the queues; its children accept connections
and serve requests. Counters that all of them share (requests in flight at each replica, the usage of each key) are in a
table in shared memory (`table.py`) with one column per process, so that a request costs no message, and the part of a
dead process can be removed. Messages (`messages.py`) carry views to the children, and requests that must wait to the
parent.
"""
