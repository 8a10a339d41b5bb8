"""The terminal: a console that prints texts as they are, a block of lines that is drawn anew, its lines."""
