"""Failures on the pages of a CI service: GitHub Actions. Other services read JUnit's file."""
