module kvpeer.io/pause

go 1.24
