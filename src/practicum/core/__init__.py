"""The foundation: seeds, crash points, notes, cancellation, stop signals, calls and plug-ins."""
