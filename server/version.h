/* The version that --version, /version and /info print. */
#ifndef SERVER_VERSION_H
#define SERVER_VERSION_H

#define PKMSERVE_VERSION "0.1.0"

#endif
