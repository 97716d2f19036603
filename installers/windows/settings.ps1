# Folders of the Windows installer; dot-sourced by install.ps1 and uninstall.ps1.
# echo-node keeps its own data in the same folder.
$HomeDir = Join-Path $env:LOCALAPPDATA 'echo-swarm'
# Each installation has its own environment; the junction `current` selects one.
$Versions = Join-Path $HomeDir 'versions'
$Environment = Join-Path $HomeDir 'current'
$BinDir = Join-Path $HomeDir 'bin'
$EchoNode = Join-Path $Environment 'Scripts\echo-node.exe'

# Returns the entries of the user's PATH, read from the registry with their %VARIABLES%. Other ways to read PATH expand
# the variables, and writing the result back would lose them.
function Get-UserPath {
    $key = Get-Item -LiteralPath 'HKCU:\Environment'
    $value = $key.GetValue('Path', '', [Microsoft.Win32.RegistryValueOptions]::DoNotExpandEnvironmentNames)
    $value -split ';' | Where-Object { $_ -ne '' }
}

function Set-UserPath([string[]] $Entries) {
    Set-ItemProperty -LiteralPath 'HKCU:\Environment' -Name 'Path' -Value ($Entries -join ';') -Type ExpandString
    # Setting any variable this way tells running programs, Explorer above all, that the environment changed.
    [Environment]::SetEnvironmentVariable('ECHO_SWARM_PATH_CHANGED', $null, 'User')
}
