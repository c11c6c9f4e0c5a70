"""Where operators, detectors and other processes of this machine reach the controller: sockets and small files."""
