from megavlm.cli import main

main()
