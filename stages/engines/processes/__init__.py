"""How the processes of a stage share work, start clean and repeat themselves."""
