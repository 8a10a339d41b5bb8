"""The processes of the local backends: a keeper per training process, a supervisor and an interpreter per sandbox.

    trainer ──socket── keeper ──fork── supervisor ──fork or sandlock── interpreter
       └───────────────socket──────────────┘

The keeper is a small Python process with a clean environment and nothing in its memory. For each sandbox it forks a
supervisor, which starts the interpreter, enforces the limits, and kills everything when the trainer closes its end of
the socket, on purpose or because it died. Nothing here imports more than the standard library (and sandlock).
"""
