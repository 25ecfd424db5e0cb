"""Who is in, and what happens next. Values in, values out: no clock, socket, thread, torch or chance is used here."""
