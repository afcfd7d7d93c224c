"""Messages between processes: frames, sessions, flow control, endpoints, keys."""
