"""What a CI service shows of a failure. Today GitHub Actions; others read JUnit's file."""
