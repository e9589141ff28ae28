/* Embeds files into the program when it is built. In assembler, since C11 has no way to embed a
 * file. The Makefile names the files as dependencies of the object. */
#ifndef SERVER_EMBED_H
#define SERVER_EMBED_H

#include <stdint.h>

/* One file; its path counts from the root of the repository. */
#define EMBED_FILE(path) ".incbin \"" path "\"\n"

/* Declares NAME_begin[], the bytes of the files one after the other, and NAME_bytes, how many they
 * are. */
#define EMBED(name, files)                                                                         \
    __asm__(".section .rodata\n"                                                                   \
            ".global " #name "_begin\n"                                                            \
            ".global " #name "_bytes\n" #name "_begin:\n" files #name "_end:\n"                    \
            ".balign 8\n" #name "_bytes:\n"                                                        \
            ".quad " #name "_end - " #name "_begin\n"                                              \
            ".previous\n");                                                                        \
    extern const char name##_begin[];                                                              \
    extern const uint64_t name##_bytes

#endif
