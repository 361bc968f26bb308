"""One gateway in several processes (`--processes N`, ADR 0018).

A parent owns the listening sockets, reads the fleet's view and keeps the queues; its children accept connections and
serve requests. Numbers that all of them must agree on (requests under way at each replica, what each key has used)
are in a table of shared memory (`table.py`) with one column per process, so that a request costs no message and a
dead process's share can be dropped. Messages (`messages.py`) carry views to the children and requests that must wait
to the parent.
"""
